package api

func wordsOfFollows() kindWords {
	return kindWords{
		operations: map[string]words{
			"put": {summary: "Make one user follow another",
				description: "201 if the follow is new. 200 if it existed: then there is no event."},
			"get": {summary: "Read a follow",
				description: "Reads the truth. 404 if the first user does not follow the second, whether or not they did before."},
			"remove": {summary: "Make one user unfollow another",
				description: "204 also if there was no follow; then there is no event."},
			"check": {summary: "Check for up to 500 pairs whether one user follows the other",
				description: "Answers for both directions. Reads a projection. A pair with an unknown user, or with one user twice, " +
					"has no follow."},
			"reverse": {summary: "List the followers of a user, newest first"},
			"forward": {summary: "List the users that a user follows, newest first"},
			"versions": {summary: "List the versions of a follow, newest first",
				description: "Shows who changed the follow, and when. An unknown pair has an empty list." + fromTheHistory},
		},
		schemas: map[string]string{"Pair": "Pair", "CheckInputBody": "CheckInputBody", "Relation": "Relation",
			"RelationList": "RelationList", "EdgeList": "EdgeList", "Counts": "Counts"},
		names: map[string]string{"active": "following", "reversed": "followed_by"},
		texts: map[string]string{"put 200": "The follow existed.", "outcome": "The pair, after a follow.",
			"following": "follower_id follows followee_id.", "followed_by": "followee_id follows follower_id.",
			"positioned_at": "When following last became true; absent if it is false."},
		codes: map[string]string{codeSelfEdge: codeSelfFollow},
	}
}
