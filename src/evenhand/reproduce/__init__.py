"""The paper's tables, run again: rows as config files, our figures beside the paper's."""
