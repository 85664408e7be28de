"""The generalization bound of the paper for a linear output layer."""
