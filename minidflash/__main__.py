from minidflash.cli import main

raise SystemExit(main())
