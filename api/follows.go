package api

func wordsOfFollows() kindWords {
	const nobody = "Reads a projection. An unknown user has an empty list."
	return kindWords{
		operations: map[string]words{
			"put": {"follow", "Make one user follow another",
				"201 if the follow is new. 200 if it existed: then there is no event."},
			"get": {"get-follow", "Read a follow",
				"Reads the truth. 404 if the first user does not follow the second, whether or not they did before."},
			"remove": {"unfollow", "Make one user unfollow another", "204 also if there was no follow; then there is no event."},
			"batch":  {"batch-follows", "Follow and unfollow up to 1000 times", ""},
			"check": {"check-follows", "Check for up to 500 pairs whether one user follows the other",
				"Answers for both directions. Reads a projection. A pair with an unknown user, or with one user twice, has no follow."},
			"reverse": {"list-followers", "List the followers of a user, newest first", nobody},
			"forward": {"list-following", "List the users that a user follows, newest first", nobody},
			"counts":  {"get-counts", "Count the edges of a user", "Reads a projection. An unknown user counts 0."},
			"versions": {"list-follow-versions", "List the versions of a follow, newest first",
				"Shows who changed the follow, and when. An unknown pair has an empty list." + fromTheHistory},
		},
		schemas: map[string]string{"Pair": "Pair", "CheckInputBody": "CheckInputBody", "Relation": "Relation",
			"RelationList": "RelationList", "EdgeList": "EdgeList", "Counts": "Counts"},
		names: map[string]string{"active": "following", "reversed": "followed_by", "put": "follow", "remove": "unfollow"},
		texts: map[string]string{"put 200": "The follow existed.", "outcome": "The pair, after a follow.",
			"following": "follower_id follows followee_id.", "followed_by": "followee_id follows follower_id.",
			"positioned_at": "When following last became true; absent if it is false."},
		codes: map[string]string{codeSelfEdge: codeSelfFollow},
	}
}
