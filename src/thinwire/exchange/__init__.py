"""The exchange thread of one worker: joint state, rounds, table, and Spark's jobs."""
