"""The command-line interface. Knows the public API only.

| file | owns |
| --- | --- |
| main | the list of commands, the entry point |
| command | how every command ends: exit codes, errors, Ctrl-C, closed pipes |
| options | the options that many commands share |
| output | documents for machines, text for people |
| rows | rows as JSON values, as one line, and as a table |
| values | texts and JSON values as a column's values |
| files, export | rows from files, and into files |
| type_names | column types as text, and back |
| schema_file | a schema from a file |
| table | create, status, verify |
| put | put |
| read | scan, sql, lookup |
| repair | repair |
| columns | columns add, drop, rename, widen |
| log | tail, trim |
| life | compact, gc, checkpoint create, list, refresh, drop |
| demo, demo_worker | the demonstration, and the processes it runs |
"""
