"""What fits cost: time, memory, compilation, growth."""
