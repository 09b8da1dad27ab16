"""Options of Beam that are parsed once, however often Beam asks for them.

Making a small pipeline and running it asks some eighty times for views of its options, each of
which makes a parser of a command line and parses the flags: a fifth of the time of such a pipeline.
"""

from __future__ import annotations

from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions


class QuickOptions(PipelineOptions):
    """The same options; all requests for a view of one type get the same one.

    Views share their values in any case: what is set in one is seen in all.
    """

    def __init__(self, flags: list[str]):
        # Beam keeps others from setting attributes that are no options.
        self.__dict__["_views"] = {}
        super().__init__(flags)

    def view_as(self, cls: Any) -> Any:
        """As that of `PipelineOptions`."""
        views: dict[Any, Any] = self.__dict__["_views"]
        if cls not in views:
            views[cls] = super().view_as(cls)
        return views[cls]
