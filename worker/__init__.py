"""What both roles share: engine thread, transfer thread, worker.v1 session, start-up."""
