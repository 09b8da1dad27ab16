"""Members made by pipelines of Beam, and results by key."""

from beamjax.sources.tables.keyed_table import KeyedTable as KeyedTable
