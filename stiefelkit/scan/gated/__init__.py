"""The recurrence of GORU, whose gates its paper puts around an orthogonal transition."""
