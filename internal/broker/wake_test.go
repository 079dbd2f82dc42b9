package broker

import "testing"

func TestAWakeUpNamesItsPartitions(t *testing.T) {
	for _, touched := range []uint32{1, 1 << 31, 1<<3 | 1<<17, ^uint32(0)} {
		if got := DecodeWake(encodeWake(touched)); got != touched {
			t.Errorf("%b came back as %b", touched, got)
		}
	}
	if got := string(encodeWake(1<<3 | 1<<17)); got != "3,17" {
		t.Errorf("got %q", got)
	}
	if got := DecodeWake([]byte("x,5,99,-1,,7")); got != 1<<5|1<<7 {
		t.Errorf("of a damaged wake-up came %b", got)
	}
}
