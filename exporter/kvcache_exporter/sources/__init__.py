"""Where readings come from: each module fetches and parses one kind of source and raises SourceError."""
