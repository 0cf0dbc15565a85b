"""What `expertd doctor` looks at: this machine, its limits, and the way to a model. Each check reads, decides and says
what it found, why it matters and what to do; none changes anything."""
