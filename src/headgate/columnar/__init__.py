"""The Columnar seam: immutable columnar files, and how they are written, read and made durable."""

from headgate.columnar.base import Columnar, Slice, VectorColumn
from headgate.columnar.place import open_columnar

__all__ = ["Columnar", "Slice", "VectorColumn", "open_columnar"]
