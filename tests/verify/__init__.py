"""What works on this machine: the maths tests, a short bench and a short training, in one report."""
