"""What runs in processes of Ray: the actors of replicas and front ends, and how they hear of each other."""
