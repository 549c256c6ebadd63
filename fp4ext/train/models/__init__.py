"""The models that the jobs train and sample, and what they are made of."""
