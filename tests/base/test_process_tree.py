"""Memory and processor time of processes that are started."""
import os
import subprocess
import sys

from ea_vision.base.process_tree import PeakMemory, tree_memory, tree_seconds

WORK = """
import subprocess, sys
held = bytearray(80 * 2**20)
for place in range(0, len(held), 4096):
    held[place] = 1
child = subprocess.run([sys.executable, "-c", "held = bytearray(range(256)) * (40 * 2**12); sum(range(8_000_000))"])
print("ready", flush=True)
sys.stdin.read()
"""


def test_children_count_and_what_has_ended_is_nothing():
    before, seconds = tree_memory(os.getpid()), tree_seconds(os.getpid())
    with PeakMemory(0.02) as memory:
        with subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            assert 80 * 2**20 < tree_memory(process.pid) < 140 * 2**20
            assert tree_memory(os.getpid()) - before > 75 * 2**20
            assert tree_seconds(process.pid) > 0.05, "with the child that has ended"
    assert memory.peak - before > 110 * 2**20, "parent and child together"
    assert tree_memory(process.pid) == 0 and tree_seconds(process.pid) == 0
    assert tree_seconds(os.getpid()) > seconds
