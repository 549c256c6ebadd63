"""python -m fp4ext …"""

import sys

from .cli import main

sys.exit(main())
