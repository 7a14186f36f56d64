"""What each pass made of a planned call, in files for people: PARTWAY_SAVE_GRAPHS.

Every value that a pass makes prints itself; here `str()` of each is written to a file, and files are compared.

    asked     what the environment asks for
    record    hears the passes of one call, and writes; who asks for nothing has a record that does nothing
    compare   how two planned calls differ, by their texts: `partway diff`
"""
