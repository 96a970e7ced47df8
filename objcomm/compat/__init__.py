"""Functions with the names and signatures of other libraries; import each module by its own name.

For each library, the page "Migrating" shows the line to change and lists the defects that this
fixes.
"""

import objcomm._public  # noqa: F401  # gives errors their public names
