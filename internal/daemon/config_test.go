package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sethvargo/go-envconfig"
)

type bounded struct {
	Every time.Duration `env:"TEST_EVERY, default=1s"`
	Count int           `env:"TEST_COUNT, default=3"`
}

func (b bounded) Validate() error {
	if b.Count > 10 {
		return fmt.Errorf("TEST_COUNT is %d: want 0..10", b.Count)
	}
	return nil
}

type sample struct {
	URL     string `env:"TEST_URL, required"`
	Other   string `env:"TEST_OTHER, default=$TEST_URL"`
	Bounded bounded
}

func TestConfigureNamesEveryVariableThatIsWrong(t *testing.T) {
	var cfg sample
	err := Configure(t.Context(), envconfig.MapLookuper(map[string]string{"TEST_EVERY": "soon", "TEST_COUNT": "many"}), &cfg)
	for _, want := range []string{`TEST_URL is not set`, `TEST_EVERY is "soon": time: invalid duration "soon"`, `TEST_COUNT is "many": `} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %s", err, want)
		}
	}
	err = Configure(t.Context(), envconfig.MapLookuper(map[string]string{"TEST_EVERY": "soon", "TEST_COUNT": "11", "TEST_URL": "u"}),
		&sample{})
	if err == nil || strings.Count(err.Error(), "\n") != 1 || !strings.Contains(err.Error(), "TEST_COUNT is 11: want 0..10") {
		t.Errorf("%v", err)
	}
	cfg = sample{}
	if err := Configure(t.Context(), envconfig.MapLookuper(map[string]string{"TEST_URL": "u", "TEST_COUNT": "4"}), &cfg); err != nil {
		t.Fatal(err)
	}
	if want := (sample{"u", "u", bounded{time.Second, 4}}); cfg != want {
		t.Errorf("%+v, want %+v", cfg, want)
	}
}

func TestHelpListsWhatAProgramReads(t *testing.T) {
	var out bytes.Buffer
	if err := Configure(t.Context(), helpLookuper{"sample", &out}, &sample{}); !errors.Is(err, errHelp) {
		t.Fatal(err)
	}
	for _, want := range []string{"TEST_URL", "required", "TEST_OTHER", "$TEST_URL", "TEST_EVERY", "1s"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s lacks %s", &out, want)
		}
	}
}
