"""The write-ahead log of a shard.

| file | owns |
| --- | --- |
| space | names |
| entry | bytes |
| log | manifests, store and clock of one shard, together |
| reader | fetching ahead |
| tip | positions and the chain's end |
| loss | the tip or a hole |
| marker | whose store this is |
| fence | claim, walk, seal, verify |
| producers | who put what, once |
| appender | one entry after another |
| pipeline | group commit |
| ack | waiting |
| tailer | following |
| collect | giving up and deleting |
"""
