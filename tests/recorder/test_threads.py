"""Threads that record one model, and recorders closed out of order: nobody's maps are another's."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch

import ea_vision
from tests.recorder.test_any_transformer import torchvision_vit
from tests.recorder.test_recording import hooks_of, tiny


def ours():
    return tiny(), 16


def theirs():
    return torchvision_vit(), 32


def timms():
    torch.manual_seed(0)
    options = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2)
    return timm.create_model("vit_tiny_patch16_224", **options).eval(), 32


def image(seed, side):
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(seed))


def maps_of(model, x):
    with torch.no_grad(), ea_vision.record_attention(model, parts="attn") as maps:
        model(x)
    return {number: layer.attn for number, layer in maps.items()}


@pytest.mark.parametrize("make", [ours, theirs, timms])
def test_each_thread_has_its_own_maps_and_bystanders_their_outputs(make):
    model, side = make()
    images = [image(seed, side) for seed in range(24)]
    with torch.no_grad():
        expected, outputs = [maps_of(model, x) for x in images], [model(x) for x in images]
    barrier = threading.Barrier(4)

    def watch(numbers):
        barrier.wait()
        return [maps_of(model, images[number]) for number in numbers]

    def pass_by(numbers):
        barrier.wait()
        with torch.no_grad():
            return [model(images[number]) for number in numbers]

    with ThreadPoolExecutor(4) as pool:
        watching = [pool.submit(watch, range(start, 24, 2)) for start in (0, 1)]
        passing = [pool.submit(pass_by, range(24)) for _ in range(2)]
        for start, future in enumerate(watching):
            for number, maps in zip(range(start, 24, 2), future.result(timeout=60), strict=True):
                assert list(maps) == list(expected[number])
                for layer, attn in maps.items():
                    torch.testing.assert_close(attn, expected[number][layer], atol=1e-6, rtol=1e-5)
        for future in passing:
            for found, output in zip(future.result(timeout=60), outputs, strict=True):
                torch.testing.assert_close(found, output, atol=1e-6, rtol=1e-5)
    assert hooks_of(model) == 0


def test_a_forward_of_another_thread_alone_is_said_not_to_be_recorded():
    model, side = timms()
    with pytest.raises(RuntimeError, match="no forward ran attention layer 1 .* in this thread"), \
            ea_vision.record_attention(model), ThreadPoolExecutor(1) as pool:
        pool.submit(model, image(0, side)).result()


def test_recorders_closed_out_of_order_say_so_and_disturb_nothing():
    model, side = timms()
    expected, x = maps_of(model, image(0, side)), image(0, side)
    first, second = ea_vision.record_attention(model), ea_vision.record_attention(model)
    with torch.no_grad():
        first.__enter__()
        maps = second.__enter__()
        model(x)
        with pytest.raises(RuntimeError, match="closed in the reverse order in which they were opened"):
            first.__exit__(None, None, None)
        model(x)  # still recorded
    second.__exit__(None, None, None)
    assert all(torch.equal(maps[number].attn, attn) for number, attn in expected.items())
    assert hooks_of(model) == 0 and torch._C._len_torch_function_stack() == 0
    assert all(torch.equal(attn, expected[number]) for number, attn in maps_of(model, x).items())


def test_a_recorder_closed_by_another_thread_says_so():
    model, side = timms()
    recorder = ea_vision.record_attention(model)
    recorder.__enter__()
    with torch.no_grad():
        model(image(0, side))
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="closed by the thread that opened it"):
        pool.submit(recorder.__exit__, None, None, None).result()
    assert hooks_of(model) == 0
    assert maps_of(model, image(0, side)).keys() == {1, 2} and torch._C._len_torch_function_stack() == 0


def test_compilation_is_on_again_when_the_last_of_two_threads_has_ended():
    model, side = timms()
    calls = []
    compiled = torch.compile(model, backend=lambda graph, inputs: calls.append(1) or graph.forward)
    inside, go_on = threading.Event(), threading.Event()

    def watch():
        with torch.no_grad(), ea_vision.record_attention(model):
            model(image(0, side))
            inside.set()
            go_on.wait()

    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        with ea_vision.record_attention(model):
            model(image(0, side))
            other = pool.submit(watch)
            inside.wait()
        compiled(image(0, side))
        assert not calls  # the other one still records
        go_on.set()
        other.result()
        compiled(image(0, side))
        assert calls
