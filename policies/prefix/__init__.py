"""The prefix index: which backend holds which blocks. One noun per file; `index` puts them together."""
