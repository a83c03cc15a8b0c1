"""One class a verb: what `%omni`, the command line and the server carry out. No IPython here."""
