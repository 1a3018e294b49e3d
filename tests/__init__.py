"""What holds in every process that imports the tests, the forked ones included."""

import os

# No test cuts the power, and what a killed process has written is safe in the kernel: the disk is not waited for, which
# thousands of small files would take minutes of. `tests/test_disk.py` and `tests/kill_and_resume.py` put it back.
FSYNC = os.fsync
os.fsync = lambda handle: None
