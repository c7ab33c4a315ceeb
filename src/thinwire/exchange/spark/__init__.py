"""The exchange over Spark alone: no port listens beside Spark's own.

A worker is an agent: a long task, with a box in a folder of its machine. Short jobs in another slot visit the boxes of
the machine they run on. They bring and fetch letters (membership, beats, evaluations: what links carry elsewhere), read
contributions out, which a shuffle sums, and bring means, which came by a broadcast::

    coordinator ─ SparkHub ─ Post ═ short jobs ═ visit() ─ Box ─ SparkLink ─ agent
                               ╰══ reduce: read, shuffle, sum ══ deliver: broadcast ══╯
"""
