"""The fault campaign: bad bytes, kills, full disks; ``python -m faults`` with tests/ on the path."""
