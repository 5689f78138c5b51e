"""What runs a recurrence chunk by chunk or at once, forward and back: one engine a file."""
