"""Servers that beamjax starts: Flink clusters, job servers and pools of workers."""
