"""Models of libraries that Penstock was not written for, unedited: what installing the extra `zoo` brings."""
