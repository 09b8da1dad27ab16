"""Pages of HTML that stand alone: what a plan is, and what a run did. Imported when one is made."""
