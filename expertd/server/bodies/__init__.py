"""What clients may send: one msgspec struct a request, checked with the JSON path of what is off."""
