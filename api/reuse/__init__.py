"""Whether a plan may be used for another call.

A call comes in; out goes the plan that an earlier, equal call was given, or nothing: then the call is planned.
"""
