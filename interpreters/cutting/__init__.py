"""A program cut into the stages that run one after the other."""
