2go été2
stop été2 été2walk on été