"""Rows for training: sources of data, shards on disk, samplers and loaders of batches."""

from thinwire.data.deformed import Deformed
from thinwire.data.loader import Batch, Loader
from thinwire.data.mean import mean_image
from thinwire.data.pictures import Pictures
from thinwire.data.sampling import Position, Sampler
from thinwire.data.shards import Shard, ShardWriter, write_shard
from thinwire.data.sources import Source, open_source, select
from thinwire.data.split import ShardFiles, split

__all__ = [
    "Batch",
    "Deformed",
    "Loader",
    "Pictures",
    "Position",
    "Sampler",
    "Shard",
    "ShardFiles",
    "ShardWriter",
    "Source",
    "mean_image",
    "open_source",
    "select",
    "split",
    "write_shard",
]
