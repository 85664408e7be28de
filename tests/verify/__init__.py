"""What works on this machine: the math tests, a short bench and a short training run, in one report."""
