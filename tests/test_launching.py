"""What a test reads from programs with several processes."""

WRITES = """
import os, sys, time
from pathlib import Path

def turn(number):
    '''Wait until it is this process's turn to write.'''
    while len(list(Path(sys.argv[1]).iterdir())) < number:
        time.sleep(0.01)

rank = int(os.environ["RANK"])
for number, part in ((rank, b"[Gloo] Rank "), (2 + rank, b"%d is connected to 1 peer ranks.\\n" % rank)):
    turn(number)
    os.write(1, part)
    Path(sys.argv[1], str(number)).touch()
if rank == 0:
    print("the result")
"""


def test_lines_of_torch_that_mix_are_left_out(launch, tmp_path):
    script, turns = tmp_path / "writes.py", tmp_path / "turns"
    script.write_text(WRITES)
    turns.mkdir()
    assert launch(script, turns) == "the result\n"
