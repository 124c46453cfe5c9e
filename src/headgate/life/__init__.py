"""The life of a table: what happens to it besides reading and writing."""
