"""The main job as a demonstration: a pipeline from writer processes to Spark, and a report of it.

Owns: the story, and checking that it held. Uses the public names only, as a user would.
"""
