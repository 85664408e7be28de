"""The fault campaign: bad bytes, kills, full disks. Run ``python -m faults`` with tests/ on the path."""
