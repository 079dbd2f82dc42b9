package demo

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// The parts of generated texts.
var (
	subjects = []string{"bakeries", "night trains", "city gardens", "old radios", "public libraries", "mountain huts", "the new trams",
		"sourdough loaves", "paper maps", "rowing clubs",
		"market halls", "street lamps", "film cameras", "river paths", "chess clubs", "repair cafes", "beehives", "the ferries",
		"solar roofs", "choirs", "allotments", "small museums"}
	titles = []string{"What nobody tells you about %s", "%s, one year later", "In praise of %s", "Why %s matter more than we think",
		"A beginner's notes on %s", "The quiet return of %s",
		"Ten small things about %s", "%s: an honest review", "Ask me anything about %s"}
	openers = []string{"I agree.", "Not so sure.", "Thank you for this.", "Honestly,", "From my own experience:", "Good point.",
		"I had to laugh.", "Yes, but", "No.", "This again."}
	claims = []string{"%s changed how I spend my weekends", "my neighbor says the same about %s", "%s deserve more money from the city",
		"I never understood the fuss about %s",
		"the photos make %s look better than they are", "we tried %s with the kids and they loved it", "%s were cheaper five years ago",
		"you forgot to mention %s", "there is a good book on %s in the shop next door", "%s only work when everybody joins in"}
	closers = []string{"What do you think?", "Has anybody tried it in winter?", "I would do it again.", "Let us meet there on Sunday.",
		"Somebody should write that down.", "That is all.", "Worth the time.", ""}
	edits = []string{"Edit: typo.", "Edit: I was wrong about the price.", "Edit: thank you all for the answers.",
		"Edit: added what I forgot."}
	lures = []string{"Cheap watches at http://watches.example/%d, today only!", "I earn 500 a day from home, see http://money.example/%d",
		"Free tickets: http://tickets.example/%d"}

	moderators = []string{"moderator:ida", "moderator:noor", "moderator:tomas"}
	whyHidden  = []string{"off topic", "advertising", "heated: let it cool down", "reported by readers"}
	whyRemoved = []string{"insults another user", "against the rules", "personal data of somebody else"}
)

// ruleActor is the actor that hides texts with links.
const ruleActor = "rule:links"

func one(rnd *rand.Rand, of []string) string { return of[rnd.IntN(len(of))] }

func sentenceCase(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

func title(rnd *rand.Rand) string {
	return sentenceCase(fmt.Sprintf(one(rnd, titles), one(rnd, subjects)))
}

// body returns a text of one to five sentences; few texts are long.
func body(rnd *rand.Rand) string {
	parts := []string{one(rnd, openers)}
	for range 1 + int(min(rnd.ExpFloat64()*1.2, 4)) {
		claim := fmt.Sprintf(one(rnd, claims), one(rnd, subjects))
		if last := parts[len(parts)-1]; !strings.HasSuffix(last, ",") && last != "Yes, but" {
			claim = sentenceCase(claim)
		}
		parts = append(parts, claim+".")
	}
	return strings.TrimSpace(strings.Join(append(parts, one(rnd, closers)), " "))
}

// lure returns a text that the rule hides.
func lure(rnd *rand.Rand) string { return fmt.Sprintf(one(rnd, lures), 1+rnd.IntN(999)) }

// short shortens and quotes a text for one line of output.
func short(s string) string {
	const room = 48
	if r := []rune(s); len(r) > room {
		s = string(r[:room-1]) + "…"
	}
	return fmt.Sprintf("%q", s)
}
