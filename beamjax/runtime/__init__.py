"""The steps of a plan, computed: the same code in this process and on a worker."""
