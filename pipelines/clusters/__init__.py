"""Servers that beamjax starts: Flink, job servers, pools of workers."""
