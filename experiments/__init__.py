"""The paper's tables, the comparison with other systems, and what scaling costs."""
