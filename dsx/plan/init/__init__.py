"""`dsx init`: a configuration to start from, chosen by the planner, with what each key means."""
