"""Program of a benchmark's processes: `python -m thinwire_lab.bench.child`, with the task as JSON on stdin."""

from __future__ import annotations

from thinwire_lab.bench import worker_process
from thinwire_lab.bench.goodput import exchange_seconds
from thinwire_lab.bench.paced import paced_steps
from thinwire_lab.bench.placement import layer_times, placed_steps
from thinwire_lab.bench.sockets import all_to_all
from thinwire_lab.bench.table import table_seconds

if __name__ == "__main__":
    worker_process.main(
        {
            "all_to_all": all_to_all,
            "exchange_seconds": exchange_seconds,
            "layer_times": layer_times,
            "paced_steps": paced_steps,
            "placed_steps": placed_steps,
            "table_seconds": table_seconds,
        },
    )
