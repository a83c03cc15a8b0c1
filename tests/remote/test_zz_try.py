from tests.engine.test_requests import *
from tests.engine.test_sleep_wake import *
from tests.engine.test_pause import *
from tests.engine.test_cancel_and_events import *
