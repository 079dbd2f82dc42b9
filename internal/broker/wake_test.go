package broker

import "testing"

func TestAWakeUpNamesItsPartitions(t *testing.T) {
	ours := Config{Stream: "EVENTS"}
	for _, touched := range []uint32{1, 1 << 31, 1<<3 | 1<<17, ^uint32(0)} {
		if got := DecodeWake(encodeWake(touched, "EVENTS"), ours); got != touched {
			t.Errorf("%b was decoded as %b", touched, got)
		}
		if got := DecodeWake(encodeWake(touched, "EVENTS-b"), ours); got != 0 {
			t.Errorf("the wake-up of another cell wakes slots %b", got)
		}
	}
	if got := string(encodeWake(1<<3|1<<17, "EVENTS-b")); got != "3,17,=EVENTS-b" {
		t.Errorf("encoded %q", got)
	}
	if got := DecodeWake([]byte("x,5,99,-1,,7"), ours); got != 1<<5|1<<7 { // as the previous release sends it, without streams
		t.Errorf("a damaged wake-up was decoded as %b", got)
	}
}
