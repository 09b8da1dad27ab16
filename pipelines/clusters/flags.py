"""Options of a pipeline: those of beamjax, and views on Beam's that cost little."""

from __future__ import annotations

import argparse
import copy
import functools
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions


class ClusterOptions(PipelineOptions):
    """Options of beamjax that users set like Beam's own."""

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--flink_cluster",
            help="Folder of a cluster that `beamjax flink up` started; runner='FlinkRunner' uses "
            "the one in its default folder if it runs.",
        )
        parser.add_argument(
            "--pipeline_timeout",
            type=float,
            help="Seconds after which one pipeline on Prism, Flink or Spark is cancelled; a run "
            "with control flow may be several pipelines. By default there is no limit.",
        )
        # A flag of Flink's job server. Added here, as Beam's Python SDK warns of unknown flags.
        parser.add_argument(
            "--execution_mode_for_batch",
            help="How Flink passes data between steps: PIPELINED or BATCH_FORCED.",
        )


class QuickOptions(PipelineOptions):
    """Options that parse the same flags once per process, and create each view once."""

    # A pipeline asks for some 20 views, and Beam parses the flags for each of them. Views share
    # their values in any case, so a value that is set in one is seen in all.

    def __init__(self, flags: list[str]):
        # Beam's class refuses to set attributes that are not options.
        self.__dict__["_views"] = {}
        super().__init__(flags)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuickOptions:
        """A copy with values of its own. Each pipeline makes one."""
        options = QuickOptions(list(self._flags or ()))
        options._all_options = copy.deepcopy(self._all_options, memo)
        return options

    def view_as(self, cls: Any) -> Any:
        """As in `PipelineOptions`."""
        views: dict[Any, Any] = self.__dict__["_views"]
        if cls not in views:
            parsed = _parsed(cls, tuple(self._flags or ()))
            for name, value in vars(parsed).items():
                if name not in self._all_options:
                    self._all_options[name] = copy.deepcopy(value)
            views[cls] = view = cls.__new__(cls)
            view._flags, view._visible_options = self._flags, parsed
            view._all_options = self._all_options
        return views[cls]

    def get_all_options(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in `PipelineOptions`."""
        known = _answers(tuple(self._flags or ()))
        # The options of classes that are imported later are found as well.
        key = repr((args, sorted(kwargs.items()), len(PipelineOptions.__subclasses__())))
        values, answer = known.get(key, (None, {}))
        if values != self._all_options:
            answer = super().get_all_options(*args, **kwargs)
            known[key] = copy.deepcopy(self._all_options), answer
        return {name: self._all_options.get(name, value) for name, value in answer.items()}


@functools.lru_cache(maxsize=1024)
def _parsed(cls: type[PipelineOptions], flags: tuple[str, ...]) -> argparse.Namespace:
    """The values of the options of a class, with their defaults."""
    values: argparse.Namespace = cls(list(flags))._visible_options
    return values


@functools.lru_cache(maxsize=64)
def _answers(flags: tuple[str, ...]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """By the arguments of `get_all_options`: the values it was called with, and its result."""
    return {}
