"""One HTML page about one or several runs: folders → `read` → `document` → `page`."""
