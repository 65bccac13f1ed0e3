"""`resilient bench attribution`: is the right rank named, and the right cause, for every fault in every engine?"""
